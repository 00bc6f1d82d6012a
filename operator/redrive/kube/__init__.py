"""The one door to the Kubernetes API, for `provision` and `replay` alike.

Reading order:

1. `resources`: which kinds of objects there are, and how one object is identified.
2. `client`: calls to the API server, their failures as the errors of `errors`.
3. `cache`: what the watches have shown of one kind.
4. `controller`: a work queue with one task for each object, woken by changes.
5. `connections`: a `connectionRef` → a broker's admin client, or why there is none.
6. `status`: conditions, written when they changed, with an Event.
7. `context`: all of the above, as the operator hands it to its journeys.
8. `sweep`: finds what was deleted while no watch looked.
"""
