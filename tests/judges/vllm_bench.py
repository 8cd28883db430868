"""vLLM's bench client, run by vLLM's own Python: its console script asks for another distribution."""

import argparse

from vllm.benchmarks import serve  # type: ignore[import-not-found,unused-ignore]

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    serve.main(parser.parse_args())
