"""Words that the synthetic conversations draw from."""

from __future__ import annotations

from random import Random

NAMES = (
    "Mia Tom Lily Ben Anna Max Sara Tim Lucy Jack Emma Sam Rosie Leo Nina Paul Zoe Finn Ella Oscar Ruby Hugo Ivy Felix "
    "Clara Theo Maya Noah Alice Milo Grace Otto Daisy Henry Molly Oliver Jane Peter Kate David Laura Simon Maria Daniel "
    "Eva Robert Julia Martin Helen George Amy Carl Olga Frank Wendy Bruno Tina Victor Paula Edgar Sofia Arthur Greta Ali "
    "Fatima Kenji Yuki Chen Priya Ravi Omar Leila Diego Carmen Ingrid Lars Nadia Igor Amara Kofi Zuri Tariq"
).split()
NOUNS = (
    "dog cat bird fish boat kite tree river ball hat cake star moon frog rabbit bear horse house garden flower bridge "
    "train car truck robot dragon castle king queen farmer baker doctor teacher apple banana carrot cookie bread cheese "
    "egg spoon cup plate table chair lamp clock book pencil crayon paper box bag key door window bell drum guitar piano "
    "song picture photo letter map road hill mountain forest lake sea island beach shell stone rock cloud rain snow wind "
    "fire candle blanket pillow bed shoe sock coat glove scarf button ribbon basket bucket shovel ladder rope wheel "
    "wagon bike sled tent lion tiger monkey elephant mouse duck goose chicken pig cow sheep goat bee butterfly spider "
    "snail turtle whale shark crab owl fox wolf deer squirrel hedgehog penguin parrot pony unicorn fairy wizard witch "
    "pirate knight princess giant monster clown magician sailor pilot nurse painter"
).split()
COLOURS = "red blue green yellow orange purple pink brown black white grey golden silver".split()
ADJECTIVES = (
    "big small little old new shiny happy sad brave kind funny quiet loud soft hard warm cold fast slow tall short round "
    "clever sleepy hungry gentle proud magic lost wooden tiny huge bright dark clean dirty sweet"
).split()
PLACES = (
    "park garden forest kitchen school library beach castle barn market zoo attic cellar tower cave harbor meadow village "
    "farm shed bakery museum station theater playground hospital office bathroom bedroom hall"
).split()
CITIES = (
    "Paris London Rome Berlin Madrid Tokyo Oslo Vienna Lisbon Dublin Cairo Delhi Sydney Boston Chicago Toronto Lima Prague "
    "Warsaw Athens Zurich Geneva Munich Hamburg Milan Naples Seoul Beijing Mumbai Nairobi Lagos Havana Quito Kyoto Osaka "
    "Seattle Denver Dallas Miami Austin Portland Amsterdam Brussels Copenhagen Stockholm Helsinki Budapest Istanbul"
).split()
FOODS = "pizza soup salad pasta rice pie cake bread cheese apples honey jam pancakes cookies noodles curry".split()
ROLES = (
    "captain king queen farmer baker doctor teacher pilot sailor painter wizard witch knight giant dragon princess prince "
    "nurse driver cook gardener librarian magician clown pirate robot dog cat horse rabbit owl bear fox parrot pony "
    "hero villain mayor judge singer dancer hunter fisherman carpenter tailor ship village river island"
).split()
VERBS = (
    "find open close start stop create delete update list show check count move copy send read write search book order "
    "buy sell draw paint clean fix build save load play record print share rename sort measure schedule cancel lock "
    "unlock add remove set fetch scan pack paste mix cook plan call invite repair water feed wash"
).split()
SYLLABLES = (
    "ba be bi bo bu da de di do du fa fe fi fo ga go ha he hi ka ke ki ko ku la le li lo lu ma me mi mo mu na ne ni no nu "
    "pa pe pi po ra re ri ro ru sa se si so su ta te ti to tu va ve vi vo wa we wi za ze zi zo zu sha cho tri bra gro"
).split()
EXTENSIONS = "txt py md json csv html js log yaml toml".split()
_HEX = "0123456789abcdef"


def made_up(rng: Random, least: int = 2, most: int = 4) -> str:
    """Returns a word that no language has, so that it can only be copied."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(least, most)))


def name(rng: Random) -> str:
    """Returns a first name, a made-up one half of the time."""
    return rng.choice(NAMES) if rng.random() < 0.5 else made_up(rng).capitalize()


def noun(rng: Random) -> str:
    """Returns a noun, seldom a made-up one."""
    return rng.choice(NOUNS) if rng.random() < 0.85 else made_up(rng)


def thing(rng: Random) -> str:
    """Returns a noun with an adjective or a colour before it."""
    return f"{rng.choice(ADJECTIVES + COLOURS)} {noun(rng)}"


def digits(rng: Random, least: int = 1, most: int = 5) -> str:
    """Returns a number of `least` to `most` digits, as text."""
    count = rng.randint(least, most)
    return rng.choice("123456789") + "".join(rng.choice("0123456789") for _ in range(count - 1))


def code(rng: Random) -> str:
    """Returns a password-like text."""
    kind = rng.randrange(4)
    if kind == 0:
        return digits(rng, 4, 7)
    if kind == 1:
        return f"{made_up(rng)}-{digits(rng, 2, 4)}"
    if kind == 2:
        return "".join(rng.choice(_HEX) for _ in range(rng.randint(4, 8)))
    return f"{noun(rng)} {noun(rng)} {noun(rng)}"


def path(rng: Random) -> str:
    """Returns a file's path."""
    folders = "".join(f"{noun(rng)}/" for _ in range(rng.randrange(3)))
    return f"{'/' if rng.random() < 0.3 else ''}{folders}{noun(rng)}.{rng.choice(EXTENSIONS)}"


def place(rng: Random) -> str:
    """Returns a city, a made-up one now and then."""
    return rng.choice(CITIES) if rng.random() < 0.7 else made_up(rng).capitalize()


def phrase(rng: Random) -> str:
    """Returns a few words, such as a title or a query."""
    kind = rng.randrange(4)
    if kind == 0:
        return thing(rng)
    if kind == 1:
        return f"{noun(rng)} and {noun(rng)}"
    if kind == 2:
        return f"{rng.choice(ADJECTIVES)} {noun(rng)} in the {rng.choice(PLACES)}"
    return " ".join(made_up(rng) if rng.random() < 0.3 else noun(rng) for _ in range(rng.randint(1, 4)))


def listed(words: list[str], last: str = "and") -> str:
    """Returns "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def article(text: str) -> str:
    """Returns the text with "a" or "an" before it."""
    return f"{'an' if text[:1].lower() in 'aeiou' else 'a'} {text}"
