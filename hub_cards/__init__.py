"""From a trained folder to a Hub repository: stage and card, check, push, verify."""
