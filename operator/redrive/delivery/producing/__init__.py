"""What applications produce with: `RetryProducer`, and asyncio."""
