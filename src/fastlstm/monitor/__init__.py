"""Run directories watched from outside: what other processes write there is read, never changed."""
