"""The help of every verb, as a person reads it on the command line.

Apart from `lab.cli`, which does things; a test holds each text against the verbs that exist.
"""

from __future__ import annotations

USAGE = """python -m lab VERB [key=value ...]

  run      measure one cell, or with -m a sweep of cells
  ls       what can be chosen: models, paths, devices, benches, codecs, experiments
  show     the composed cell, its id and hash, and the command that measures it
  doctor   versions, device, disk, MLflow store, attempts left by killed processes
  plan     bytes per component and device before anything loads: fits or not, roofline, and what would make it fit
  matrix   measured, gap and not run, for an experiment
  report   write the stage report of an experiment, in English or Chinese
  compare  two cells: faster or slower only where the samples support it
  convert  write a model in another format: GGUF, VQF, safetensors
  invalidate  mark a measured attempt as not valid, with the reason; nothing is deleted
  export   write records to one file, to carry them to another machine
  import   take records from such files, and bring MLflow up to date with runs/

python -m lab VERB --help says more. Exit codes: 0 OK, 2 wrong command or configuration, 3 recorded gap, 130 interrupted."""

RUN_HELP = """python -m lab run [-m] [--json] [key=value ...]

Measures one cell in a child process and stores a record under runs/ (LAB_RUNS), mirrored into MLflow (MLFLOW_TRACKING_URI).
Choices: model= path= device= (auto: cuda if there is one, else cpu) bench=; layers=N keeps the first N layers; any value by its dotted
key, as printed by `show`, e.g. path.components.experts.codec=q2_levels or bench.repeats=9.

  -m, --multirun  sweep over commas, range() and glob(), e.g. path=reference,expert_q2 layers=3,6. All cells are checked before the first
                  runs. A cell whose newest result is OK with the same resume key (configuration, code, artifact, protocols, versions,
                  machine) is skipped, unless another attempt may fill a gap of it, or force=true. Without -m a cell is always measured.
  experiment=NAME a sweep over the cells that experiments/NAME.yaml expects; path=..., layers=... beside it choose among them
  --json          print the record (for a sweep: the list of records) as one JSON document on standard output, everything else on standard error

Exit: 0 every cell OK (single metrics may be gaps), 3 a cell without any number, 2 wrong command or configuration (nothing was run), 130 interrupted."""

SHOW_HELP = """python -m lab show [key=value ...]

Prints the cell that `run` would measure as YAML, then its id, hash and the command that leads to it. Measures nothing. Exit: 0, 2."""

LS_HELP = """python -m lab ls [models|paths|devices|benches|codecs|experiments]

Prints what can be chosen, with a word on paths that cannot run yet. Exit: 0, 2."""

DOCTOR_HELP = """python -m lab doctor

Looks at versions, GPUs (driver, memory in use by others, clocks and what holds them down), host memory, swap, load, cores, CPU clocks, pinned memory,
disk, temporary folder, /dev/shm, environment variables, MLflow store and records, and prints what it found, with the fix where something is in the
way (WARN, BAD; ? is not known). Every run makes the same checks and keeps them in its record. Also closes attempts left by killed processes.
Exit: 0 ready to measure (warnings included), 1 something needed is missing or full."""

PLAN_HELP = """python -m lab plan [-m] [--json] [--memory=GIB,...] [key=value ...]

The capacity ledger of a cell, from the model's sizes and the codecs' byte counts alone: bytes per component and place, fits / does not fit / by how
much, the roofline of TG and PP, and what would make it fit. Loads nothing and needs no model files where model.geometry names the sizes.

  -m, --multirun   one line per cell of a sweep, as for `run`; experiment=NAME takes the cells of an experiment
  --memory=32,104  judge against these device memories, in GiB, instead of what is free on this machine or stands in the device's file
  --json           one JSON document on standard output

Exit: 0 everything fits, 3 something does not or is not known, 2."""

COMPARE_HELP = """python -m lab compare A B [--json]

A and B are attempts: CELL_ID (its newest OK attempt), CELL_ID/ATTEMPT or a record file. Says that A is faster or slower than B only where a rank test
over the samples (p < 0.01) and the interval of the ratio (95 %) support it, and better or worse where standard errors do. Another device, machine or
bench refuses the comparison, another protocol, cache state or text the metric.

  --json          print the comparison as one JSON document

Exit: 0, 2."""

INVALIDATE_HELP = """python -m lab invalidate CELL_ID/ATTEMPT --reason TEXT

Marks one attempt as not valid: it stays on disk, in MLflow (tag) and in reports, marked, and no number of it is shown as current any more. The mark
is kept beside the record with the time and the user's name, and travels with it. Exit: 0, 2."""

EXPORT_HELP = """python -m lab export FILE [experiment=NAME]

Writes every record (or those of an experiment's cells), with their marks, to one file of JSON lines for `import` on another machine, gzipped under a
name in .gz. Log files do not travel. An earlier export of that name is replaced, any other file is not. Exit: 0, 2."""

IMPORT_HELP = """python -m lab import [FILE ...]

Takes the records of exported files into runs/, as attempts numbered by time of start; what is there already is left alone, so that it can be repeated
and done in any order. A file with any fault is refused as a whole. With or without a file, it closes attempts left by killed processes, moves back
records that had to be kept in the temporary folder, mirrors into MLflow every record that is not there yet, brings the standing of each run up to date,
and ends runs left RUNNING. MLflow can be rebuilt from runs/ alone.
Exit: 0, 3 if the store did not take everything, 2."""

MATRIX_HELP = """python -m lab matrix experiment=NAME [--json]

Sets an experiment's expected cells against the records: measured, gap or not run. Measures nothing. Exit: 0, 2."""

REPORT_HELP = """python -m lab report experiment=NAME [lang=en|zh]

Writes the experiment's stage report into reports/, as Markdown and as one self-contained HTML file, and prints the names of the files. Measures nothing.
An existing report that shows measured values is not replaced by one that would show none. Exit: 0, 2."""
