"""``jaxmem diff`` ends as diff(1) does, and plans an entry as the other plan was asked for."""

from __future__ import annotations

import json

import pytest

from jaxmem import cli
from jaxmem.planner.plan import Plan
from tests.cli.test_cli import INFEASIBLE
from tests.show.samples import GIB, plan


@pytest.fixture(autouse=True)
def plans(workplace):
    plan().save(workplace / "one.json")
    plan(predicted_bytes=17 * GIB).save(workplace / "two.json")


def test_plans_that_do_the_same(capsys):
    assert cli.main(["diff", "one.json", "one.json"]) == 0
    assert capsys.readouterr().out == "train_step\nno difference\n"
    assert cli.main(["diff", "one.json", "one.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["same"] is True


def test_plans_that_differ(workplace, capsys):
    assert cli.main(["diff", "one.json", "two.json"]) == 1
    assert "predicted" in capsys.readouterr().out
    assert cli.main(["diff", "one.json", "two.json", "--json", "-o", "diff.json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["same"] is False
    assert [change["name"] for change in found["changes"]] == ["predicted"]
    assert json.loads((workplace / "diff.json").read_text()) == found


@pytest.mark.parametrize("words", [["one.json", "train:entry"], ["train:entry", "one.json"]])
def test_an_entry_is_planned_as_the_plan_was_asked_for(planning, words, capsys):
    planning.answer = plan()
    assert cli.main(["diff", *words]) == 0
    ((_, args, options),) = planning.seen
    assert args == (1.0,)
    assert options == {"budget": plan().budget_bytes, "target": plan().target, "policy": None}


def test_a_plan_that_was_made_for_this_machine_is_planned_for_it(planning, workplace):
    plan(target="cpu").save(workplace / "here.json")
    planning.answer = plan(target="cpu")
    assert cli.main(["diff", "here.json", "train:entry"]) == 0
    assert planning.seen[0][2]["target"] is None


def test_the_policy_of_the_plan_is_followed_again(planning, workplace):
    from jaxmem import policies

    plan(policy=policies.dots.to_json()).save(workplace / "ruled.json")
    planning.answer = Plan.load(workplace / "ruled.json")
    assert cli.main(["diff", "ruled.json", "train:entry"]) == 0
    assert planning.seen[0][2]["policy"] == policies.dots


def test_a_step_that_does_not_fit_any_more_is_no_mere_difference(planning, capsys):
    planning.answer = INFEASIBLE
    assert cli.main(["diff", "one.json", "train:entry"]) == 2
    assert "no plan fits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["one.json", "none.json"], "'none.json' is neither a file with a plan nor module:functi"),
        (["one.json", "train.py"], "train.py: not a jaxmem plan"),
        (["one.json", "."], "is not a jaxmem plan"),
        (["train:entry", "train:entry"], "are both module:function. One of them must be a plan"),
        (["one.json", "train:fails"], "train:fails raised ValueError"),
    ],
)
def test_trouble_does_not_look_like_a_difference(words, message, capsys):
    assert cli.main(["diff", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_bug_does_not_look_like_a_difference(planning, capsys):
    planning.answer = lambda fun, *args: {}[0]
    assert cli.main(["diff", "one.json", "train:entry"]) == 2
    assert "KeyError: 0" in capsys.readouterr().err
