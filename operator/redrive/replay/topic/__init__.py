"""What rests in a topic, where, and how it is read: `reading`, the spine, gives messages in order.

`broker` connects; `snapshot` says of each `partition` what rests and what is acknowledged; `ranges`
cuts that into what is moved at a time. `rows` is a message as columns, `messageid` and `position`
say where it lies: `position` binds what is sent to where it came from, which makes a run
repeatable. Sets of entries are `bitmap`s.
"""
