"""How handlers run: workers, time-outs, rate limit, and what a handler returned."""
