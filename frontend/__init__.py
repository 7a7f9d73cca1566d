"""What users call: the mark, capture, compile, reports. The only folder that sees everything."""
