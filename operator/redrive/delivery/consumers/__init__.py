"""Consumers: `RetryConsumer`, `SimpleConsumer`, `BroadcastConsumer`, and those of asyncio."""
