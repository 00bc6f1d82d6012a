"""How messages come: subscriptions, one stream of several topics, the order of keys."""
