"""Pack one file into a docker archive, which containerd imports: the pause image needs no more."""

import hashlib
import io
import json
import tarfile
from pathlib import Path


def write_single_file_image(binary: Path, *, image: str, target: Path) -> None:
    """Write an image whose only layer is `binary` in the root folder, which is also its entry point."""
    layer_buffer = io.BytesIO()
    with tarfile.open(fileobj=layer_buffer, mode="w") as layer:
        layer.add(binary, arcname=binary.name)
    layer_bytes = layer_buffer.getvalue()
    configuration = json.dumps({
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": [f"/{binary.name}"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer_bytes).hexdigest()}"]},
    }).encode()  # fmt: skip
    configuration_name = f"{hashlib.sha256(configuration).hexdigest()}.json"
    manifest = json.dumps([{"Config": configuration_name, "RepoTags": [image], "Layers": ["layer.tar"]}]).encode()
    with tarfile.open(target, "w") as archive:
        for name, data in (
            (configuration_name, configuration),
            ("manifest.json", manifest),
            ("layer.tar", layer_bytes),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
