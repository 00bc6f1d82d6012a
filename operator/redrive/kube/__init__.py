"""The only access to the Kubernetes API, for `provision` and `replay` alike.

Reading order:

1. `resources`: the kinds of objects, the key of an object, and the fields that a cache retains.
2. `client`: calls to the API server, and their failures as errors.
3. `cache`: the last known objects of one kind, with listeners for changes.
4. `informer`: list and watch, which fill the caches, and relists for what a watch missed.
5. `controller`: a work queue with one task for each object, with back-off.
6. `status`: conditions, written when they changed, with an Event; finalizers.
7. `connections`: a `connectionRef` → a broker's admin client, with `credentials`.
8. `context`: all of the above, as the operator passes it to its journeys.
9. `leader_election`: of several operators one is active.
10. `logs`, which need no extra; `observability`: metrics and heartbeats.
"""
