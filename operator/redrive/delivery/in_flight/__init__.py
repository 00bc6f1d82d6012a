"""Messages between reception and acknowledgement: ack time-outs, poison messages, timers."""
