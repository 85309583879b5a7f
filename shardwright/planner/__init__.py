"""What a layout takes before it is started: steps replayed in one process, without data and without memory."""
