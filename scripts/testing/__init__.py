"""The test runner behind `scripts/test.sh`: what is tested, in which form, what may run beside what, and what is said about it.

The parts, each of which knows only those before it:

- `options`: the command line.
- `cache`, `assets`: what tests need beside the packages of the system (programs, Python and Node environments), kept between runs.
- `suites`: the table of suites. A new suite is a row there.
- `tasks`, `plan`: what one run does, as processes that depend on each other.
- `schedule`: which of them may begin now. No processes and no clock, so it is tested as a function.
- `processes`, `runner`: begin them, watch them, end them.
- `display`, `machine`, `timings`, `report`: what is printed.
- `rust`, `prepare`, `changes`, `hunt`: programs and tables of single steps.

Only the standard library of Python 3.11 is used. `scripts/test.sh` checks the rights and the words, installs packages, and
hands over.
"""
