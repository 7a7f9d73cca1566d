"""What the commands of ``lazyinline`` do, once their arguments are parsed.

run          which function runs which command
compiling    ``bench``, ``inspect``, ``export``, ``advise``, ``report``
cache        ``cache``
plan_memory  ``plan-memory``
colours      colours of a diff, on terminals only
user_errors  what the command says of an error in one line
"""
