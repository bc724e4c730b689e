"""What axe-core finds wrong with a page for people with disabilities (WCAG 2.2 A and AA, and axe's best practices)."""

import base64
import hashlib
import io
import pathlib
import tarfile
import urllib.error
import urllib.request

VERSION = "4.14.1"
ADDRESS = f"https://registry.npmjs.org/axe-core/-/axe-core-{VERSION}.tgz"
SHA512 = "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="
KEPT = pathlib.Path(__file__).parents[2] / f"target/tools/axe-{VERSION}.min.js"


def script():
    """The text of axe-core, kept after it was fetched once; `None` where it cannot be fetched."""
    if KEPT.exists():
        return KEPT.read_text()
    try:
        with urllib.request.urlopen(ADDRESS, timeout=30) as answer:
            archive = answer.read()
    except (urllib.error.URLError, TimeoutError):
        print(f"{ADDRESS} cannot be reached: accessibility is not checked")
        return None
    digest = base64.b64encode(hashlib.sha512(archive).digest()).decode()
    assert digest == SHA512, f"{ADDRESS}: {digest}"
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        text = files.extractfile("package/axe.min.js").read().decode()
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    KEPT.write_text(text)
    return text


def check(driver):
    """Asserts that axe-core finds no violation in the page that is open, unfolded, in the light and in the dark. Returns in
    words what was checked."""
    text = script()
    if text is None:
        return "accessibility not checked"
    driver.run("document.querySelectorAll('details').forEach((part) => { part.open = true; });")
    driver.run(text)
    for scheme in ("light", "dark"):
        driver.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        clean(driver, scheme)
    driver.devtools("Emulation.setEmulatedMedia", features=[])
    return "accessible by axe-core"


def clean(driver, scheme):
    """Asserts that axe-core, which the page has loaded, finds no violation."""
    driver.call("POST", f"{driver.session}/timeouts", {"script": 60_000})
    body = {"script": "axe.run().then((found) => arguments[0](found.violations));", "args": []}
    violations = driver.call("POST", f"{driver.session}/execute/async", body)
    said = [
        f"{found['id']} ({found['impact']}): {found['help']}\n    " + "\n    ".join(
            f"{node['target']}: {node['html'][:160]} {(node['any'] or node['all'] or node['none'] or [{}])[0].get('message', '')}"
            for node in found["nodes"][:5]
        )
        for found in violations
    ]
    assert not said, f"axe-core finds, in the {scheme}:\n  " + "\n  ".join(said)
