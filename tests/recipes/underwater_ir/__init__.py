"""Makes the recipe's package importable, as in its own folder."""

import sys

from tests.conftest import PROJECT

FOLDER = PROJECT / "recipes" / "underwater_ir"
if str(FOLDER) not in sys.path:
    sys.path.insert(0, str(FOLDER))
