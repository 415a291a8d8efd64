"""`tether report`: write the page of a run again, also of one that runs or died."""

import sys

from tether.cli.arguments import existing_run, parser, print_json


def run(arguments: list[str]) -> int:
    """Write RUN/report.html and say where it is."""
    options = parser("report", "Write RUN/report.html again from what lies in the run folder.")
    options.add_argument("run", metavar="RUN", help="run folder")
    options.add_argument("--json", action="store_true", help="print {report: path} as JSON")
    given = options.parse_args(arguments)
    folder = existing_run(given.run)

    from tether.report import build_report

    path = build_report(folder)
    if given.json:
        print_json({"report": str(path)})
    else:
        sys.stdout.write(f"report: {path}\n")
    return 0
