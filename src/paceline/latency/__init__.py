"""The latency path: one decoder forward of few rows as one kernel that stays on the card."""
