"""Training. Reading and planning a recipe load no torch."""

from xlstm7b.train.plan import Plan, describe, make_plan
from xlstm7b.train.recipe import Layout, Recipe, load_recipe, recipe_names

__all__ = ["Layout", "Plan", "Recipe", "describe", "load_recipe", "make_plan", "recipe_names"]
