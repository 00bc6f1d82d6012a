"""What a consumer does around each message, one concern to a file; `chain` is the protocol."""
