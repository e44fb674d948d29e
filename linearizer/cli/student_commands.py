"""The commands that use a student, and the page: compare, read, ask, state, serve, push, app."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path

from linearizer.cli.options import OPERANDS, AddCommand, add_raw_option, add_writing_options
from linearizer.cli.text import (
    describe_comparison,
    describe_preview,
    describe_reading,
    describe_states,
    print_product,
    print_stream,
    show_progress,
)
from linearizer.errors import RequestError, Stopped
from linearizer.run.names import find_run
from linearizer.serve.server import HOST, LOCAL_HOSTS, MAX_SECONDS, MAX_STATE_BYTES, PORT, listen, serve

KEY_VARIABLE = "LINEARIZER_API_KEY"
UNGUARDED = (
    "linearizer: warning: whoever reaches this address can use the student, and can find out from cache hits which "
    f"texts others have sent: set --api-key, or {KEY_VARIABLE}"
)

OWNED = """Open this link; from another machine, with this one's name in place of 0.0.0.0:

    {}

Whoever has it can do all that you can: start and delete runs, pay for jobs, publish with your token, read your files.
"""


def add_commands(add: AddCommand) -> None:
    command = add("compare", serve_compare, "teacher, student and a plain window answer the same prompt", "run")
    command.add_argument("--prompt", default="The", help="what to ask (default: %(default)s)")
    add_picture_option(command)
    add_writing_options(command, "how many tokens each writes", 64)
    add_read(add)
    add_ask(add)
    add_state(add)
    add_serve(add)
    add_push(add)
    add_app(add)


def add_picture_option(command: argparse.ArgumentParser) -> None:
    about = "a picture that is shown before the text, to a model that reads pictures; repeated: several"
    command.add_argument("--picture", type=Path, metavar="FILE", action="append", default=[], help=about)


def serve_compare(arguments: argparse.Namespace) -> None:
    from linearizer import pipeline

    run = find_run(arguments.run)
    options = arguments.tokens, arguments.seed, arguments.sample, arguments.raw, arguments.picture
    comparison = show_progress(pipeline.compare_run(run, arguments.prompt, *options))
    print_product(arguments, asdict(comparison), describe_comparison(comparison))


def add_read(add: AddCommand) -> None:
    about = "let a run's student read a text, and write its state to a file for `linearizer ask`"
    command = add("read", serve_read, about, "run")
    command.add_argument("file", metavar="FILE", help="a text file, a PDF, or - for standard input")
    command.add_argument("--state", type=Path, required=True, help="the file of the state")
    command.add_argument("--more", action="store_true", help="continue after what the state has read")
    command.add_argument(
        "--stream",
        action="store_true",
        help="read once, as from a stream: faster, in less memory, but the answers know less of the text. Without it a "
        "text that is not too long is read twice, and the state keeps what the model needs to repeat it",
    )
    add_picture_option(command)
    add_raw_option(command)


def serve_read(arguments: argparse.Namespace) -> None:
    from linearizer.serve import kept_state
    from linearizer.teacher.text import decode_document, read_whole

    run = find_run(arguments.run)
    if arguments.file == "-":
        text = decode_document("standard input", sys.stdin.buffer.read())
    else:
        text = read_whole(Path(arguments.file))
    options = arguments.state, arguments.more, arguments.raw, arguments.picture, arguments.stream
    reading = show_progress(kept_state.read(run, text, *options))
    print_product(arguments, asdict(reading), describe_reading(reading, arguments.run, arguments.state))


def add_ask(add: AddCommand) -> None:
    about = "let a run's student answer a prompt, with --state after the text that it has read"
    command = add("ask", serve_ask, about, "run")
    wanted = command.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--prompt", help="what to ask")
    wanted.add_argument("--take-back", action="store_true", help="undo the last --keep or `read --more` of the state")
    command.add_argument("--state", type=Path, help="a file that `linearizer read` wrote")
    command.add_argument("--keep", action="store_true", help="add prompt and answer to the state")
    add_picture_option(command)
    add_writing_options(command, "how many tokens it writes", 256)
    names = ("keep", "picture", "tokens", "sample", "seed", "raw")
    command.set_defaults(of_prompt={name: command.get_default(name) for name in names})


def serve_ask(arguments: argparse.Namespace) -> None:
    from linearizer.serve import kept_state

    run = find_run(arguments.run)
    if arguments.take_back:
        if arguments.state is None:
            raise RequestError("there is no state to take back: name its file with --state")
        if given := [name for name, default in arguments.of_prompt.items() if getattr(arguments, name) != default]:
            raise RequestError(f"--{given[0]} is for a prompt, and --take-back has none: leave it out")
        reading = kept_state.take_back(run, arguments.state)
        print_product(arguments, asdict(reading), describe_reading(reading, arguments.run, arguments.state))
        return
    options = arguments.keep, arguments.tokens, arguments.seed, arguments.sample, arguments.raw, arguments.picture
    answer = print_stream(kept_state.ask(run, arguments.prompt, arguments.state, *options), arguments.json)
    if arguments.json:
        print_product(arguments, asdict(answer), "")


def add_state(add: AddCommand) -> None:
    command = add("state", serve_state, "list, fork or delete the states that `linearizer read` wrote, or get one")
    command.add_argument("action", choices=["list", "fork", "delete", "get"])
    command.add_argument(
        "path", type=Path, metavar="S", help="the file of a state; to list: a folder; to get: OWNER/NAME"
    )
    command.add_argument("new", type=Path, nargs="?", metavar="NEW", help="the file of the fork, or of what is got")


def serve_state(arguments: argparse.Namespace) -> None:
    from linearizer.serve import shared_states, state_files

    if (arguments.new is not None) != (arguments.action in ("fork", "get")):
        raise RequestError(
            "fork needs S and NEW, get OWNER/NAME and NEW, list and delete S alone; see `linearizer state --help`"
        )
    if arguments.action == "delete":
        state_files.delete(arguments.path)
        print_product(arguments, {"deleted": str(arguments.path)}, f"{arguments.path} is deleted")
    elif arguments.action == "get":
        found = shared_states.get_state(arguments.path.as_posix(), arguments.new)
        print_product(arguments, asdict(found), f"{found.tokens:,} tokens of {arguments.path} are in {arguments.new}")
    elif arguments.action == "fork":
        forked = state_files.fork(arguments.path, arguments.new)
        print_product(arguments, asdict(forked), f"{arguments.new} is a fork of {arguments.path}")
    else:
        states = state_files.list_states(arguments.path)
        print_product(arguments, [asdict(state) for state in states], describe_states(states))


def add_serve(add: AddCommand) -> None:
    command = add(
        "serve",
        serve_serve,
        "serve an endpoint like OpenAI's: chat and completions, streamed or not, for any number of clients",
        "run",
        description="Serve a run's student behind an endpoint like OpenAI's. Requests are computed together, and the "
        "states of conversations are kept, so that the next turn reads only new text. In addition to OpenAI's fields "
        "it serves top_k, min_p, repetition_penalty and chat_template_kwargs; it ignores fields that do not affect the "
        "text (user, metadata, …) and refuses all others. "
        "`transformers serve` cannot serve a student, because it does not load a checkpoint's code; vLLM can, where "
        "this package is installed.",
    )
    command.add_argument("--port", type=int, default=PORT, help="the port; 0: any free port (default: %(default)s)")
    command.add_argument("--host", default=HOST, help="the address to listen at (default: this machine alone)")
    command.add_argument(
        "--max-state-bytes",
        type=int,
        default=MAX_STATE_BYTES,
        help="of states kept in memory between requests, and of the states that each key owns (default: %(default)s)",
    )
    command.add_argument(
        "--max-seconds", type=float, default=MAX_SECONDS, help="that a request may take (default: %(default)g)"
    )
    command.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="that requests must carry; repeated: one for each client, who does not see the states of others (default: "
        f"those in ${KEY_VARIABLE}, between spaces, which other users of this machine cannot read)",
    )
    command.add_argument(
        "--states", type=Path, metavar="FOLDER", help="where the states that clients own lie (default: RUN/states)"
    )
    command.add_argument("--teacher", action="store_true", help="serve the teacher instead, for comparison")


def serve_serve(arguments: argparse.Namespace) -> None:
    def say(url: str, model: str) -> None:
        if arguments.host not in LOCAL_HOSTS and not keys:
            print(UNGUARDED, file=sys.stderr)  # noqa: T201
        print_product(arguments, {"url": url, "model": model}, f"{model} is served at {url}: ctrl-C ends it")
        sys.stdout.flush()

    run, written = find_run(arguments.run), os.environ.get(KEY_VARIABLE)
    keys = arguments.api_key or ([] if written is None else written.split() or [""])
    limits = arguments.max_state_bytes, arguments.teacher, arguments.max_seconds, keys, arguments.states
    serve(run, arguments.port, arguments.host, *limits, say)


def add_push(add: AddCommand) -> None:
    command = add("push", serve_push, "publish a run's student on the Hub, private unless --public")
    command.add_argument("run", metavar="RUN", nargs="?", help=OPERANDS["run"])
    command.add_argument("name", metavar="OWNER/NAME", nargs="?", help="the repository; NAME alone: under your account")
    command.add_argument("--space", metavar="OWNER/NAME", help="publish this app as a Space, instead of a run")
    command.add_argument("--state", type=Path, metavar="S", help="publish a state as a data set, instead of a run")
    command.add_argument("--public", action="store_true", help="let everyone see it")
    command.add_argument("--dry-run", action="store_true", help="show what would be sent, and send nothing")


def serve_push(arguments: argparse.Namespace) -> None:
    from linearizer.publish import push

    operands = [name for name in ("run", "name", "space", "state") if getattr(arguments, name) is not None]
    if operands not in (["run", "name"], ["space"], ["run", "state"]):
        raise RequestError(
            "push needs RUN and OWNER/NAME, or --space OWNER/NAME alone, or --state S and OWNER/NAME; see `linearizer "
            "push --help`"
        )
    private = not arguments.public
    if arguments.state is not None:
        return push_state(arguments, private)
    run = None if arguments.run is None else find_run(arguments.run, encoders=True)
    if arguments.dry_run:
        preview = push.preview(run, arguments.name or arguments.space, private)
        print_product(arguments, asdict(preview), describe_preview(preview))
        return
    for warning in push.list_warnings(run) if run else ():
        print(f"linearizer: warning: {warning}", file=sys.stderr)  # noqa: T201
    try:
        published = show_progress(push.publish(run, arguments.name or arguments.space, private=private))
    except KeyboardInterrupt as stopped:
        raise Stopped("stopped; what has arrived is not sent again: repeat the command to go on") from stopped
    print_product(arguments, asdict(published), f"{published.url}\n\n{published.snippet}" if run else published.url)


def push_state(arguments: argparse.Namespace, private: bool) -> None:
    from linearizer.serve import shared_states

    if arguments.dry_run:
        raise RequestError("--dry-run lists what a run or the app would send, not a state: leave it out")
    published = show_progress(shared_states.push_state(arguments.state, arguments.run, private))
    print_product(arguments, asdict(published), f"{published.url}\n\n{published.snippet}")


def add_app(add: AddCommand) -> None:
    command = add("app", serve_app, "serve the page: all of this in a browser")
    command.add_argument("--host", help="the address to listen at (default: this machine alone)")
    command.add_argument("--port", type=int, help="the port (default: the first free port from 7860 on)")
    command.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"that requests must carry (default: ${KEY_VARIABLE}, which other users of this machine cannot read, or a "
        "new key where --host serves other machines, which is shown); the page opens with ?key=KEY after its address",
    )


def serve_app(arguments: argparse.Namespace) -> None:
    from linearizer.page import zerogpu

    key, written = arguments.api_key, os.environ.get(KEY_VARIABLE)
    if key is None and written is not None:
        if len(written.split()) > 1:
            raise RequestError(f"{KEY_VARIABLE} has several keys, and the page takes one: name it with --api-key")
        key = written.strip()
    if zerogpu.on_zerogpu():
        zerogpu.import_spaces()  # before anything else looks for a device
    if arguments.port is not None or arguments.host:  # Gradio's own error would name its parameters
        listen(arguments.host or HOST, arguments.port or 0).close()
    from linearizer.page import site

    try:
        site.serve_page(arguments.port or None, arguments.host, key, say_link)
    except OSError as error:
        raise RequestError(f"the page cannot be shown ({error}): name another --port") from error


def say_link(link: str) -> None:
    print(OWNED.format(link), flush=True)  # noqa: T201
