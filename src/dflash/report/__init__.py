"""Reading a run's log: series, trends and verdicts, terminal text."""
