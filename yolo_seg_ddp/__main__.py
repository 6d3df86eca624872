"""The command `yolo-seg-ddp`, also `python -m yolo_seg_ddp`: the scripts, and the extras that are
commands.
"""

import ast
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

from yolo_seg_ddp.utils.environment import SCRIPTS_FOLDER
from yolo_seg_ddp.utils.errors import EXIT_USAGE, print_error, printable
from yolo_seg_ddp.utils.text import COMMAND, MODULE, SCRIPTS


def main() -> None:
    """Run a command, which exits with its code; without one say what there is."""
    called = COMMAND if Path(sys.argv[0]).stem == COMMAND else MODULE
    files = {name: SCRIPTS_FOLDER / f"{script}.py" for name, script in SCRIPTS.items()}
    extras = Path(__file__).parent.glob("extras/*/__main__.py")
    files |= {file.parent.name: file for file in sorted(extras)}

    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(f"{called} COMMAND ...; `{called} COMMAND --help` lists the options of one:\n")
        for command, file in files.items():
            words = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            print(f"  {command:<12}{' '.join(words.partition(chr(10) * 2)[0].split())}")
        return

    # A part of an extra may be a command, too: `orthophotos.cut`.
    module = (
        f"yolo_seg_ddp.scripts.{SCRIPTS[name]}"
        if name in SCRIPTS
        else f"yolo_seg_ddp.extras.{name}"
    )
    if name.partition(".")[0] not in files or find_spec(module) is None:
        print_error(f"{printable(name)} is no command; {called} lists them")
        sys.exit(EXIT_USAGE)

    sys.argv[:2] = [f"{called} {name}"]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
