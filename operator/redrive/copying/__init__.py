"""What a copy of a message takes over from it; shared by the hops of `delivery` and by `replay`.

`reading` takes keys, properties and schema version from a message, whatever its producer wrote.
`writer_schemas` finds the schema to send a copy with, `errors` are the reasons why there is none.
"""
