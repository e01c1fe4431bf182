"""`baton quantize`: writes an unquantized model folder again in a weight format."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from baton.rpc.errors import InvalidRequest, ServiceError
from baton.services.settings import SettingsError
from baton.services.up.model_source import resolve_model
from baton.worker.weights.quantizing.table import SCHEMES

EXIT_DONE = 0
EXIT_REFUSED = 1
_FLAGS = {"format": "--format", "group_size": "--group-size", "ignore": "--ignore", "calibrate": "--calibrate"}
_MIB = 1 << 20
_ABOUT = (
    "Writes an unquantized model folder again with weights of 8 or 4 bits, rounded to the nearest. Embeddings, heads, "
    "routers, norms and biases stay as they are. Without --calibrate the model is not run. Baton, vLLM and "
    "Transformers read the folder."
)


def main(argv: Sequence[str]) -> int:
    """Writes the folder, and prints what it took. Returns the exit code."""
    options = _parser().parse_args(list(argv))
    try:
        folder = Path(resolve_model(options.model, options.revision))
        result = _quantize(folder, options)
    except ServiceError as error:
        print(f"baton quantize: {_with_flag(error)}", file=sys.stderr)
        return EXIT_REFUSED
    except SettingsError as error:
        print(f"baton quantize: {str(error).replace('--model', 'MODEL', 1)}", file=sys.stderr)
        return EXIT_REFUSED
    except OSError as error:
        print(f"baton quantize: {options.out}: {error.strerror}", file=sys.stderr)
        return EXIT_REFUSED
    print("\n".join(_lines(options, result)))
    return EXIT_DONE


def _quantize(folder: Path, options: argparse.Namespace) -> Any:
    """Returns what was written, with progress on a terminal."""
    scheme_of = importlib.import_module("baton.worker.weights.quantizing.scheme").scheme_of
    quantize = importlib.import_module("baton.worker.weights.quantizing.quantize").quantize
    scheme = scheme_of(options.format, options.group_size)
    calibration = _calibration(folder, options) if options.calibrate else None
    shown = _Progress()
    try:
        return quantize(folder, Path(options.out), scheme, tuple(options.ignore), shown, calibration=calibration)
    finally:
        shown.close()


def _calibration(folder: Path, options: argparse.Namespace) -> Any:
    """Returns what tunes the rounding to a text. Raises InvalidRequest for a file that is none."""
    try:
        text = Path(options.calibrate).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"calibrate={options.calibrate}: {error.strerror}", field="calibrate") from error
    except UnicodeDecodeError as error:
        message = f"calibrate={options.calibrate}: byte {error.start} is no UTF-8; give a text file"
        raise InvalidRequest(message, field="calibrate") from error
    made = importlib.import_module("baton.worker.weights.quantizing.auto_round").AutoRoundCalibration
    return made(folder, text, options.calibration_window, options.calibration_steps)


class _Progress:
    """Writes the part that is done over itself, on a terminal."""

    def __init__(self) -> None:
        self._percent = -1
        self._shows = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        percent = 100 * done // max(1, total)
        if self._shows and percent != self._percent:
            self._percent = percent
            sys.stderr.write(f"\r{percent:3} % of {total / _MIB:,.0f} MiB")
            sys.stderr.flush()

    def close(self) -> None:
        if self._percent >= 0:
            sys.stderr.write("\n")


def _parser() -> argparse.ArgumentParser:
    formats = "\n".join(f"  {row.name:<13} {row.summary} ({row.quant_method})" for row in SCHEMES.values())
    parser = argparse.ArgumentParser(
        prog="baton quantize",
        description=_ABOUT,
        epilog=f"formats, and their quant_method:\n{formats}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="A folder with config.json and safetensors, or a hub id.")
    parser.add_argument("out", metavar="OUT", help="The new folder.")
    parser.add_argument("--format", required=True, choices=tuple(SCHEMES), help="See below.")
    parser.add_argument(
        "--group-size", type=int, metavar="N", help="Columns that share a scale, of formats in groups. Default: 128."
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="NAME",
        help="Linears that stay as they are: a name, the end of one, a pattern with *, or a regular expression behind "
        "re:. May be repeated.",
    )
    parser.add_argument(
        "--calibrate",
        default="",
        metavar="TEXT",
        help="A text file, to whose tokens AutoRound tunes the rounding of integers in groups. Runs the model, on a "
        'GPU if there is one; needs pip install "baton-inference[calibrate]".',
    )
    parser.add_argument(
        "--calibration-window",
        type=_positive,
        default=512,
        metavar="N",
        help="Tokens of the text that are read together. Default: 512; at most 512 windows are read.",
    )
    parser.add_argument(
        "--calibration-steps",
        type=_positive,
        default=200,
        metavar="N",
        help="Steps of the tuning of each block of layers. Default: 200.",
    )
    parser.add_argument("--revision", default="", metavar="NAME", help="Branch, tag or commit of a hub id.")
    return parser


def _positive(word: str) -> int:
    value = int(word)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def _lines(options: argparse.Namespace, result: Any) -> Iterator[str]:
    before, after = result.source_bytes, result.num_bytes
    yield options.out
    yield f"  {'format':<9}  {options.format}: {SCHEMES[options.format].summary}"
    yield f"  {'packed':<9}  {result.num_packed} linears, without {_some(result.left_out)}"
    yield f"  {'weights':<9}  {before / _MIB:,.1f} MiB before, {after / _MIB:,.1f} MiB now"
    yield (
        f"  {'rounding':<9}  {result.error:.2%} of the packed weights (root mean square), at most "
        f"{result.worst_error:.2%}: {result.worst}"
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _with_flag(error: ServiceError) -> str:
    """Returns the message with the field that it begins with named as the flag."""
    for field, flag in _FLAGS.items():
        if error.message.startswith((f"{field}=", f"{field}:")):
            return error.message.replace(field, flag, 1)
    return error.message
