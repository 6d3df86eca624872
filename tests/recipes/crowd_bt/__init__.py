"""Makes the package crowd_bt importable, as the recipe's scripts do."""

import sys

from tests.conftest import PROJECT

FOLDER = PROJECT / "recipes" / "crowd_bt"
if str(FOLDER.parent) not in sys.path:
    sys.path.insert(0, str(FOLDER.parent))
