"""Compiles the CUDA extensions of mamba_ssm and causal_conv1d into the folder `peers`.

It looks for their unpacked sources in the current folder, and compiles the forward passes of
bfloat16 and float32 with real weights only: all types and the backward passes would take hours.
README.md says how to use it.
"""

import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from torch.utils.cpp_extension import load

# A function, the type of its parameters, the pairs of types it has, and those to compile.
Function = tuple[str, str, list[tuple[str, str]], list[tuple[str, str]]]

HALF, BF16, FLOAT, COMPLEX = "at::Half", "at::BFloat16", "float", "c10::complex<float>"
FLAGS = ["-O3", "--use_fast_math", "--expt-relaxed-constexpr", "--expt-extended-lambda"]
FLAGS += [
    f"-U__CUDA_NO_{kind}_{what}__"
    for kind in ("HALF", "BFLOAT16", "BFLOAT162")
    for what in ("OPERATORS", "CONVERSIONS")
]
INCLUDES = ["cuda_runtime.h", *(f"c10/util/{each}.h" for each in ("Exception", "complex"))]
INCLUDES += [f"c10/util/{each}.h" for each in ("BFloat16", "Half")]


def write_sources(
    name: str, folder: Path, header: str, kernels: list[str], functions: list[Function]
) -> Path:
    """Writes the kernels with the types to compile. Of other types, a call raises an error."""
    built = Path("build") / name
    built.mkdir(parents=True, exist_ok=True)
    lines = [f"#include <{each}>" for each in INCLUDES]
    lines += [f'#include "{header}"', "namespace at { using c10::BFloat16; using c10::Half; }"]
    kept: set[str] = set()
    for function, params, types, compiled in functions:
        rest = f"({params} &, cudaStream_t)"
        error = '{ TORCH_CHECK(false, "this was not compiled"); }'
        lines.append(f"template <typename I, typename W> void {function}{rest} {error}")
        for a, b in types:
            if (a, b) in compiled:
                kept.add(f"{function}<{a}, {b}>")
            else:
                lines.append(f"template void {function}<{a}, {b}>{rest};")
    (built / "stubs.cpp").write_text("\n".join(lines) + "\n")
    for kernel in kernels:
        text = (folder / kernel).read_text()
        pattern = r"template void (\w+<[^>]*>)\([^;]*;"
        text = re.sub(pattern, partial(_if_kept, kept), text)
        (built / kernel).write_text(text)
    return built


def build(
    name: str,
    folder: Path,
    header: str,
    binding: str,
    kernels: list[str],
    functions: list[Function],
) -> None:
    built = write_sources(name, folder, header, kernels, functions)
    sources = [folder / binding, *(built / each for each in (*kernels, "stubs.cpp"))]
    load(
        name,
        [str(each.resolve()) for each in sources],
        extra_cflags=["-O3"],
        extra_cuda_cflags=FLAGS,
        extra_include_paths=[str(folder)],
        build_directory=str(built),
        is_python_module=False,
        verbose=True,
    )
    shutil.copy(built / f"{name}.so", "peers")


def _source(pattern: str) -> Path:
    folder = next(Path().glob(pattern), None)
    if folder is None:
        sys.exit(f"there is no folder {pattern}: unpack the sources here first")
    return folder.resolve()


def _if_kept(kept: set[str], found: re.Match[str]) -> str:
    return found[0] if found[1] in kept else ""


def main() -> None:
    scan_types = [(a, b) for a in (HALF, BF16, FLOAT) for b in (FLOAT, COMPLEX)]
    scanned = [(BF16, FLOAT), (FLOAT, FLOAT)]
    scan = (
        "selective_scan_cuda",
        _source("mamba_ssm-*/csrc/selective_scan"),
        "selective_scan.h",
        "selective_scan.cpp",
        ["selective_scan_fwd_bf16.cu", "selective_scan_fwd_fp32.cu"],
        [
            ("selective_scan_fwd_cuda", "SSMParamsBase", scan_types, scanned),
            ("selective_scan_bwd_cuda", "SSMParamsBwd", scan_types, []),
        ],
    )
    types = [(a, b) for a in (HALF, BF16, FLOAT) for b in (HALF, BF16, FLOAT)]
    compiled = [(BF16, BF16), (FLOAT, FLOAT)]
    convolution = (
        "causal_conv1d_cuda",
        _source("causal_conv1d-*/csrc"),
        "causal_conv1d.h",
        "causal_conv1d.cpp",
        ["causal_conv1d_fwd.cu", "causal_conv1d_update.cu"],
        [
            ("causal_conv1d_fwd_cuda", "ConvParamsBase", types, compiled),
            ("causal_conv1d_channellast_fwd_cuda", "ConvParamsBase", types, compiled),
            ("causal_conv1d_update_cuda", "ConvParamsBase", types, compiled),
            ("causal_conv1d_bwd_cuda", "ConvParamsBwd", types, []),
            ("causal_conv1d_channellast_bwd_cuda", "ConvParamsBwd", types, []),
        ],
    )
    with ThreadPoolExecutor() as pool:
        for each in [pool.submit(build, *scan), pool.submit(build, *convolution)]:
            each.result()


if __name__ == "__main__":
    main()
