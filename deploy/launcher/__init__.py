"""`hawk up`: one cluster on this machine; planned, checked, started, watched and stopped."""
