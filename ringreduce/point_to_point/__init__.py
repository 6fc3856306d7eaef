"""Messages from one rank to another, apart from all collectives: matching, waiting, errors."""
