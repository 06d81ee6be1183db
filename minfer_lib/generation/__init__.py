"""What was asked, and which token comes next? Parameters, requests, sampling, stopping (chapter 2)."""
