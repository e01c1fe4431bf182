"""Common words for prompts as text; most are one token in any vocabulary."""

_TEXT = (
    "the and was she they that with for his had him said one day her very little big then saw out from went time "
    "there were all not what when back home want like could have this them would into over some play look made good "
    "house tree dog cat bird ball water book green blue red sun old new friend mother school car box hand eyes hair "
    "walk run found asked help away down around under after before every other more many first last long great "
    "small high right left next early young important few public bad same able people year way thing man world life "
    "part child woman place work week case point company number group problem fact"
)
WORDS = tuple(_TEXT.split())
