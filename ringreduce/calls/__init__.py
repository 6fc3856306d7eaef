"""The public calls: check the arguments, find the plan, run it in order, finish or break it off."""
