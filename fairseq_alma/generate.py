"""alma-generate: continue texts with the language model of a run.

alma-generate RUN --prompt "It was"
alma-generate CHECKPOINT [CHECKPOINT ...] --stream STREAM --prompt "It was"

Without --prompt and --prompts, each line of the standard input is a prompt.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from fairseq_alma.api import Choice, LanguagePredictor, load
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.files import read_text
from fairseq_alma.core.printing import hide_messages_of_libraries, say
from fairseq_alma.core.program import Parser, add_models, command

_DEFAULT = Choice()


@command("alma-generate")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command alma-generate and return its exit status. It prints texts, or JSON with --json."""
    parser = Parser(prog="alma-generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(
        parser, "use", "the stream folder, or another folder with its dict.txt and the file of its tokenizer (default: "
        "the stream of the run)",
    )  # fmt: skip
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="a text to continue; may be repeated")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="a file with a prompt in each line; empty lines are skipped"
    )
    parser.add_argument("--num", type=int, default=1, help="number of continuations of each prompt (default: 1)")
    for name, metavar, text in (
        ("max_tokens", "N", "largest number of tokens of a continuation"),
        ("min_tokens", "N", "smallest number of tokens of a continuation"),
        ("temperature", "T", "divide the scores by T before a token is drawn; 0: the most probable token"),
        ("top_k", "K", "draw from the K most probable tokens only; 0: from all"),
        ("top_p", "P", "draw from the smallest set of tokens that has the probability P"),
        ("beam", "N", "search for the most probable continuation with N candidates; 1: draw tokens"),
    ):
        default = getattr(_DEFAULT, name)
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=type(default), default=default, metavar=metavar,
            help=f"{text} (default: {default})",
        )  # fmt: skip
    parser.add_argument("--seed", type=int, help="seed of the draws (default: another one each time)")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:N")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each continuation instead of text")
    arguments = parser.parse_args(argv)
    hide_messages_of_libraries()
    try:
        if arguments.num < 1:
            raise SettingError(f"--num {arguments.num}: give a number that is 1 or more")
        if arguments.num > 1 and (arguments.beam > 1 or arguments.temperature == 0):
            raise SettingError("--beam and --temperature 0 find one text for each prompt: leave out --num")
        options = {name: getattr(arguments, name) for name in vars(_DEFAULT)}
        Choice(**options)  # checks the options, before the models are loaded
        given = _given_prompts(arguments.prompt, arguments.prompts)
        predictor = load(arguments.path, arguments.stage, arguments.device, arguments.stream)
        if given is None and sys.stdin.isatty():
            for prompt in _typed_prompts():
                _print(predictor, [prompt], arguments.num, options, arguments.json)
            return 0
        prompts = _lines(sys.stdin) if given is None else given
        if not prompts:
            where = f"{arguments.prompts} has no line with text" if arguments.prompts else "there is no prompt"
            raise SettingError(f'{where}: give --prompt TEXT; --prompt "" begins a document')
        _print(predictor, prompts, arguments.num, options, arguments.json)
    except KeyboardInterrupt:
        print()  # end the line of a prompt or a text
        raise
    return 0


def _given_prompts(texts: list[str] | None, file: Path | None) -> list[str] | None:
    """Return the prompts of --prompt and --prompts, or None if neither was given."""
    if file is None:
        return texts
    if not file.is_file():
        raise SettingError(f"there is no file {file}: give --prompts a file with a prompt in each line")
    return [*(texts or []), *_lines(read_text(file, f"--prompts {file}").split("\n"))]


def _lines(lines: Iterable[str]) -> list[str]:
    """Return the lines that are not empty, without their ends."""
    return [line.rstrip("\r\n") for line in lines if line.strip()]


def _typed_prompts() -> Iterator[str]:
    """Yield each line that the user types, until the end of the input (Ctrl-D)."""
    while True:
        try:
            yield input("prompt> ")
        except EOFError:
            print()
            return


def _print(predictor: LanguagePredictor, prompts: Sequence[str], num: int, options: dict, as_json: bool) -> None:
    """Continue prompts and print the results: a single one piece by piece if it is text for a terminal."""
    for prompt in prompts:
        if (length := 1 + len(predictor.tokenizer.encode(prompt))) > predictor.window:
            say(
                f"alma-generate: a prompt has {length} tokens with the first </s>, more than the {predictor.window} of "
                f"the context: its beginning is not read",
                sys.stderr,
            )
    if len(prompts) * num == 1 and options["beam"] == 1 and sys.stdout.isatty() and not as_json:
        say(prompts[0], end="")
        for piece in predictor.generate_pieces(prompts[0], **options):
            say(piece, end="")
        print()
        return
    found = predictor.generate([prompt for prompt in prompts for _ in range(num)], **options)
    for number, one in enumerate(found):
        if as_json:
            print(json.dumps(vars(one)), flush=True)
        else:
            say("-----\n" * (number > 0) + one.prompt + one.text)


if __name__ == "__main__":
    sys.exit(main())
