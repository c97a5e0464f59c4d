"""What is done about ranks that are late, lost or new: recovery."""
