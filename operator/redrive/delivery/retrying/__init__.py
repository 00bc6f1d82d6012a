"""What becomes of a failed message: verdict, retry topic or dead-letter topic, acknowledgement."""
