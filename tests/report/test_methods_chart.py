"""Every recipe that was measured has its points in the chart, which say what it reached."""

import re

from linearizer.plan.recipes import RECIPES, measured_quality
from linearizer.report.methods_chart import draw_methods


def test_each_recipe_says_what_it_reached_at_each_budget():
    drawn = dict(re.findall(r'<g class="lz-method" data-recipe="([^"]+)">(.*?)</g>', draw_methods()))
    assert drawn.keys() == measured_quality().keys() & RECIPES.keys()
    for name, rows in measured_quality().items():
        told = re.findall(r"(\d+) tokens: KL ([\d.e-]+)<", drawn[name])
        assert told == [(str(row.budget), f"{row.kl:.2g}") for row in rows]


def test_what_is_nearer_to_the_teacher_stands_lower():
    heights = {
        name: [float(y) for y in re.findall(r'cy="([\d.]+)"', points)]
        for name, points in re.findall(r'data-recipe="([^"]+)">(.*?)</g>', draw_methods())
    }
    at_128 = {name: rows[-1].kl for name, rows in measured_quality().items() if rows[-1].budget == 128}
    assert sorted(at_128, key=lambda name: -heights[name][-1])[:2] == sorted(at_128, key=at_128.__getitem__)[:2]
