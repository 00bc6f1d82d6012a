from __future__ import annotations

import dataclasses
from datetime import timedelta
from string import ascii_letters, digits

from hypothesis import strategies as st

from redrive.policy import naming
from redrive.policy.ladder import Ladder
from redrive.policy.model import OutageLimits, Policy, SubscriptionType
from redrive.policy.naming import Scheme, TopicName

STEPS = {".", ".."}  # path segments that lead to another address
entities = st.text(ascii_letters + digits + "-=:._", min_size=1, max_size=12).filter(
    lambda name: name not in STEPS
)
# Anything but slashes, control characters and white space.
locals_ = st.text(
    st.characters(
        codec="utf-8", exclude_categories=["Cc", "Zs", "Zl", "Zp"], exclude_characters="/"
    ),
    min_size=1,
    max_size=40,
).filter(lambda name: name not in STEPS and not name.startswith("__"))
st.register_type_strategy(
    TopicName,
    st.builds(TopicName, entities, entities, locals_).filter(
        lambda topic: topic.without_partition() == topic and not topic.is_system
    ),
)
st.register_type_strategy(
    Ladder,
    st.builds(
        Ladder,
        st.lists(
            st.integers(1, 864_000).map(lambda n: timedelta(seconds=n)), min_size=1, max_size=8
        ).map(tuple),
        st.just(0.0) | st.floats(0, 1),
    ),
)
seconds = st.integers(1, 3_600).map(lambda n: timedelta(seconds=n))
st.register_type_strategy(
    OutageLimits,
    st.integers(1, 10_000).flatmap(
        lambda window: st.builds(
            OutageLimits,
            min_messages=st.integers(1, window),
            failure_percent=st.integers(1, 100),
            window=st.just(window),
            max_probe_interval=seconds,
            max_pause=seconds,
            count_not_retryable=st.booleans(),
        )
    ),
)
st.register_type_strategy(
    Policy,
    st.builds(
        Policy,
        topic=st.just(TopicName("shop", "prod", "orders")) | st.from_type(TopicName),
        subscription=locals_,
        subscription_type=st.sampled_from(SubscriptionType),
        max_retries=st.integers(0, 30) | st.integers(0, 1_000),
        ladder=st.from_type(Ladder),
        levels=st.from_type(Ladder).map(lambda ladder: Ladder(ladder.rungs)),
        dead_letters=st.booleans(),
        name=st.text(st.characters(codec="utf-8"), max_size=20),
        generation=st.integers(0, 2**63 - 1),
        outage_breaker=st.none() | st.from_type(OutageLimits),
        ignore_outages=st.booleans(),
        dead_letter_now=st.frozensets(st.text(st.characters(codec="utf-8")), max_size=3),
    )
    .flatmap(
        lambda policy: (
            st.just(policy)
            if policy.subscription_type is SubscriptionType.SHARED
            else st.booleans().map(lambda ordered: dataclasses.replace(policy, ordered=ordered))
        )
    )
    .flatmap(
        lambda policy: (
            st.just(policy)
            | st.sampled_from(Scheme).map(
                lambda scheme: dataclasses.replace(
                    policy,
                    retry_topic=naming.retry_topic(policy.topic, policy.subscription, scheme),
                    dead_letter_topic=naming.dead_letter_topic(
                        policy.topic, policy.subscription, scheme
                    ),
                )
            )
        )
    ),
)
