from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redrive.provision.cautions import cautions
from redrive.provision.facts import Asked

MakeBody = Callable[..., dict[str, Any]]
MakeAsked = Callable[..., Asked]
SHORT = {"scheme": "tdmq-2.7.2"}


def test_a_policy_that_nobody_contests_needs_no_caution(policy: MakeBody, asked: MakeAsked) -> None:
    assert cautions(asked(policy()), ()) == ()


def test_a_descending_ladder_needs_caution(policy: MakeBody, asked: MakeAsked) -> None:
    [caution] = cautions(asked(policy(delayLadder={"delays": ["2s", "1s"]})), ())
    assert caution.reason == "LadderDescends"
    assert "sort the delays" in caution.message


def test_the_oldest_names_the_younger_policies_that_it_keeps_from_their_topics(
    policy: MakeBody, asked: MakeAsked
) -> None:
    older = asked(policy("old", naming=SHORT))
    same = asked(policy("same", age=2, naming=SHORT))
    other = asked(policy("other", age=1, topic="persistent://shop/prod/returns", naming=SHORT))
    elsewhere = asked(policy("away", age=3, naming=SHORT), adminUrl="http://there:8080")
    conflict, collision = cautions(older, [same, other, elsewhere])
    assert (conflict.reason, collision.reason) == ("ResourceConflict", "NameCollision")
    assert "got RetryPolicy shop/same;" in conflict.message
    assert "got RetryPolicy shop/other;" in collision.message
    assert cautions(other, [older]) == ()


def test_of_many_younger_policies_the_oldest_are_named(policy: MakeBody, asked: MakeAsked) -> None:
    many = [asked(policy(f"p{age}", age=age)) for age in range(1, 9)]
    [caution] = cautions(asked(policy("old")), many[::-1])
    assert "got RetryPolicy shop/p1, " in caution.message
    assert "RetryPolicy shop/p5, 3 more;" in caution.message
