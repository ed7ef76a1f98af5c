"""From windows and refs to what emitters read: programs, loops and values."""
