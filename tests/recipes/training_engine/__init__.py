"""Makes the recipe's modules importable, as in its own folder."""

import sys

from tests.conftest import PROJECT

FOLDER = PROJECT / "recipes" / "training_engine"
if str(FOLDER) not in sys.path:
    sys.path.insert(0, str(FOLDER))
