"""How long, how many tokens, how sure? Forecasts with the revision of their predictor."""
