"""The public calls: check arguments, find the plan, run it in order, finish or break it off.

A `Communicator` has the public methods alone, and is made of a runner, an engine and an ending.
The engine runs one call at a time.  `Engine.run_now` runs a call that is one plan, at once.
`Engine.run` runs any other call as a generator that is polled: asynchronous calls, lists, counts
that ranks do not know, `wire=`, arrays on a GPU.  `Engine.finish` completes a call that compiled
code has begun, and that waits for other ranks.
"""
