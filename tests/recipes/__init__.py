"""Makes the modules of the recipes importable, as their scripts do."""

import sys

from tests.support.plugin import PROJECT

RECIPES = PROJECT / "recipes"
for folder in (RECIPES, RECIPES / "training_engine", RECIPES / "underwater_ir"):
    sys.path[:0] = [str(folder)] if str(folder) not in sys.path else []
