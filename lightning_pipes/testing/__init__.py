"""For tests, ours and those of schedules elsewhere: conformance, generated problems, references, ranks as processes."""
