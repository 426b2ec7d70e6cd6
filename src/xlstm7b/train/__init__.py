"""Training: recipes, schedules, the optimizer, plans. Nothing here loads torch until it is used."""

from xlstm7b.train.plan import Plan, describe, resolved
from xlstm7b.train.recipe import Layout, Recipe, load_recipe
from xlstm7b.train.settings import recipe_names

__all__ = ["Layout", "Plan", "Recipe", "describe", "load_recipe", "recipe_names", "resolved"]
