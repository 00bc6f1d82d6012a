"""What is reported of messages: events for log and hook."""
