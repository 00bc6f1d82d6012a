"""The operator is killed after each call of a reconcile: the next one finishes its work."""

from __future__ import annotations

from tests.chaos.conftest import Scene, springs
from tests.chaos.proxy import done_then, passing
from tests.integration.provision.conftest import rest_path


def test_killed_after_each_call_that_makes_a_policys_topics(scene: Scene) -> None:
    scene.source("made-by-one")
    calls = scene.calls("", lambda: scene.ask("made-by-one"), "made-by-one")
    assert scene.made("made-by-one") == scene.right
    assert calls > 10
    for number in range(1, calls + 1):
        name = f"made-by-two-{number:02}"
        scene.source(name)
        with scene.proxy.trap("", number, done_then(scene.kill)) as trap:
            scene.ask(name)
            springs(trap)
        scene.restart()
        scene.shop.ready(name)
        assert scene.made(name) == scene.right, f"after call {number}"
        scene.is_intact()
        scene.shop.kubectl("delete", "retrypolicy", name, "--timeout=30s")


def test_killed_after_each_call_that_repairs_a_policys_topics(scene: Scene) -> None:
    scene.source("mended")
    scene.ask("mended")
    scene.shop.ready("mended")

    def break_it(retries: int) -> None:
        """Take away what can be taken away without losing a message, and have it looked at."""
        retry, dead = (
            rest_path(scene.shop.topic(f"mended-fulfilment-{t}")) for t in ("RETRY", "DLQ")
        )
        scene.shop.request("DELETE", f"{retry}/permissions/fulfilment")
        scene.shop.request("POST", f"{retry}/messageTTL?messageTTL=60")
        scene.shop.request("DELETE", f"{dead}/permissions/fulfilment")
        scene.shop.request("DELETE", f"{dead}/subscription/redrive")
        scene.shop.kubectl("delete", "configmap", "mended-redrive")
        scene.ask("mended", maxRetries=retries)

    calls = scene.calls("", lambda: break_it(1), "mended")
    assert scene.made("mended") == scene.right
    assert calls > 5
    for number in range(1, calls + 1):
        with scene.proxy.trap("", number, done_then(scene.kill)) as trap:
            break_it(number + 1)
            springs(trap)
        scene.restart()
        scene.shop.ready("mended")
        assert scene.made("mended") == scene.right, f"after call {number}"
        assert scene.shop.get("configmap", "mended-redrive")["data"]
        scene.is_intact()


def test_killed_after_each_call_of_a_deletion(scene: Scene) -> None:
    def provision(name: str) -> None:
        """Have a policy whose retry topic redrive made, and whose dead-letter topic it adopted."""
        scene.source(name)
        scene.shop.create_topic(scene.shop.topic(f"{name}-fulfilment-DLQ"))
        scene.ask(name, deletionPolicy="Delete", adopt=True)
        scene.shop.ready(name)

    def gone(name: str) -> None:
        scene.shop.kubectl("wait", "--for=delete", f"retrypolicy/{name}", "--timeout=60s")

    def delete(name: str) -> None:
        scene.shop.kubectl("delete", "retrypolicy", name, "--wait=false")

    provision("ended-one")
    with scene.proxy.trap("", 0, passing) as counter:
        delete("ended-one")
        gone("ended-one")
        calls = counter.count
    right = scene.made("ended-one")
    assert (
        len(right) == 1 + 2 + 1
    )  # the source topic with its partitions, and what was there before
    assert calls > 5
    for number in range(1, calls + 1):
        name = f"ended-two-{number:02}"
        provision(name)
        with scene.proxy.trap("", number, done_then(scene.kill)) as trap:
            delete(name)
            springs(trap)
        scene.restart()
        gone(name)
        assert scene.made(name) == right, f"after call {number}"
        scene.is_intact()
