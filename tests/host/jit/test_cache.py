"""The disk cache: what is stored comes back, what is damaged does not, and no trouble with the disk stops a call."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from flexbwd.errors import CacheNotice
from flexbwd.jit import cache, objects, tidy, toolchain
from flexbwd.jit.cache import Cache
from flexbwd.sm90.tile import FwdTile

CONFIG, OTHER = FwdTile(64, 64), FwdTile(128, 128)


def entry(config: object = CONFIG) -> Path:
    store = cache.default()
    [path] = store.store.glob(cache.key_of(cache.canonical(config)) + ".[so]*")
    return path


def never():
    raise AssertionError("compiled although it is on disk")


@pytest.fixture
def stored(made):
    """A kernel on disk, in a process that has forgotten it."""
    kernel, new = cache.default().find_or_make(CONFIG, lambda: made)
    assert kernel is not made and new  # it runs from the file at once
    return entry()


def test_a_stored_kernel_is_a_library_that_checks_its_arguments(stored):
    kernel, new = cache.default().find_or_make(CONFIG, never)
    assert not new and stored.suffix == ".so"
    with pytest.raises(TypeError):
        kernel(1, 2, 3)
    assert oct(stored.parent.stat().st_mode & 0o777) == "0o700"


def test_another_configuration_is_another_kernel(stored):
    assert cache.default().find(OTHER) is None


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.9, 0.999], ids="{:.1%}".format)
def test_a_truncated_file_is_made_again(stored, made, share):
    whole = stored.read_bytes()
    stored.unlink()
    stored.write_bytes(whole[: int(len(whole) * share)])
    assert cache.default().find(CONFIG) is None
    assert cache.default().find_or_make(CONFIG, lambda: made)[1]
    assert objects.sound(stored, cache.canonical(CONFIG))


def test_a_flipped_bit_anywhere_is_seen(stored):
    whole = stored.read_bytes()
    stored.unlink()
    for place in [*range(0, len(whole), 997), *range(len(whole) - 60, len(whole))]:
        bad = bytearray(whole)
        bad[place] ^= 1 << (place % 8)
        stored.write_bytes(bad)
        assert not objects.sound(stored, cache.canonical(CONFIG)), place
    assert cache.default().find(CONFIG) is None


@pytest.mark.parametrize("content", [b"", b"x" * 56, b"\x7fELF" + bytes(4000), b"\x80\x04cos\nsystem\n."], ids=range(4))
def test_a_foreign_file_is_not_loaded(stored, content):
    stored.unlink()
    stored.write_bytes(content)
    assert cache.default().find(CONFIG) is None


def test_a_kernel_under_another_ones_name_is_not_loaded(stored):
    os.rename(stored, stored.with_name(cache.key_of(cache.canonical(OTHER)) + ".so"))
    assert cache.default().find(OTHER) is None


def test_a_file_that_does_not_load_is_a_miss():
    text = cache.canonical(OTHER)
    path = cache.default().store / f"{cache.key_of(text)}.so"
    path.write_bytes(b"no library")
    objects.seal(path, text)
    assert objects.sound(path, text) and cache.default().find(OTHER) is None


def test_without_a_linker_the_object_is_kept_and_the_dsl_loads_it(made, monkeypatch):
    monkeypatch.setattr(objects.shutil, "which", lambda name: None)
    cache.default().find_or_make(CONFIG, lambda: made)
    assert entry().suffix == ".o"
    with pytest.raises(TypeError):
        cache.default().find(CONFIG)(1, 2, 3)


# -- who may use it ----------------------------------------------------------------------------------------------------
def test_switched_off_nothing_is_read_or_written(stored, made, monkeypatch, folder):
    monkeypatch.setenv("FLEXBWD_CACHE", "0")
    before = sorted(folder.rglob("*"))
    assert cache.default().find_or_make(CONFIG, lambda: made) == (made, True)
    assert sorted(folder.rglob("*")) == before


def test_a_folder_that_cannot_be_made_costs_only_the_compile(made, monkeypatch):
    monkeypatch.setenv("FLEXBWD_CACHE_DIR", "/dev/null/cache")
    with pytest.warns(CacheNotice, match="cannot be made"):
        assert cache.default().find_or_make(CONFIG, lambda: made) == (made, True)
    assert cache.default().find_or_make(CONFIG, lambda: made) == (made, True)  # and no second notice


def test_a_read_only_folder_still_serves(stored, made, monkeypatch, folder):
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: access(path, mode) and not mode & os.W_OK)
    with pytest.warns(CacheNotice, match="cannot be written"):
        store = Cache.under(folder)
    assert not store.find_or_make(CONFIG, never)[1]
    assert store.find_or_make(OTHER, lambda: made)[1] and store.find(OTHER) is None


def test_a_full_disk_costs_only_the_compile(made, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(objects, "seal", lambda path, text: full(path))
    with pytest.warns(CacheNotice, match="No space left"):
        assert cache.default().find_or_make(CONFIG, lambda: made) == (made, True)
    assert not [p for p in cache.default().store.iterdir() if p.suffix in (".so", ".o") or ".tmp" in p.name]


def test_another_users_folder_is_not_used(stored, made, monkeypatch, folder):
    monkeypatch.setattr(os, "getuid", lambda real=os.getuid: real() + 4711)
    if stored.stat().st_uid == 0:  # root's folder may be read, as root's programs are; here it stands for anybody's
        for path in (folder, stored.parent):
            os.chown(path, 1234, -1)
    with pytest.warns(CacheNotice, match="another user"):
        store = Cache.under(folder)
    assert store.folders == () and store.store is None


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777], ids=oct)
@pytest.mark.parametrize("which", ["root", "fingerprint"])
def test_a_folder_that_others_can_write_is_not_used(stored, folder, which, mode):
    (folder if which == "root" else stored.parent).chmod(mode)
    with pytest.warns(CacheNotice, match="others can write"):
        store = Cache.under(folder)
    assert store.store is None
    assert which == "root" or store.folders == ()


# -- versions ----------------------------------------------------------------------------------------------------------
def with_driver(monkeypatch, driver):
    tools = toolchain.toolchain()
    changed = toolchain.Toolchain(tools.facts, driver, tools.flavour, tools.runtime)
    monkeypatch.setattr(cache, "toolchain", lambda: changed)
    cache._default.cache_clear()
    return cache.default()


def test_another_driver_is_another_kernel(made, monkeypatch):
    with_driver(monkeypatch, "13.0").find_or_make(CONFIG, lambda: made)
    assert with_driver(monkeypatch, "13.1").find(CONFIG) is None
    assert with_driver(monkeypatch, toolchain.NO_DRIVER).find(CONFIG) is None
    assert with_driver(monkeypatch, "13.0").find(CONFIG) is not None


def test_a_kernel_made_without_a_driver_serves_every_one(made, monkeypatch):
    with_driver(monkeypatch, toolchain.NO_DRIVER).find_or_make(CONFIG, lambda: made)
    assert with_driver(monkeypatch, "13.1").find(CONFIG) is not None


def test_a_compiler_of_another_flavour_than_expected_stores_nothing(made, monkeypatch):
    monkeypatch.setattr(cache, "_flavour_as_expected", lambda: False)
    assert cache.default().find_or_make(CONFIG, lambda: made)[1]
    assert cache.default().find(CONFIG) is None


def test_sources_edited_since_the_process_began_switch_the_cache_off(stored, made, monkeypatch):
    store = cache.default()
    monkeypatch.setattr(cache, "edited", lambda: True)
    assert store.find_or_make(OTHER, lambda: made) == (made, True) and store.find(OTHER) is None
    cache._default.cache_clear()
    assert cache.default().find_or_make(CONFIG, lambda: made) == (made, True)


# -- waiting and tidying -----------------------------------------------------------------------------------------------
def test_who_comes_second_waits_and_loads(made):
    def slow():
        time.sleep(0.3)
        return made

    results = []
    threads = [
        threading.Thread(target=lambda: results.append(cache.default().find_or_make(CONFIG, slow))) for _ in range(3)
    ]
    cache.default()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(new for _, new in results) == [False, False, True] and made.exports == 1


def test_a_lock_that_is_never_given_back_does_not_stop_a_call(made, monkeypatch):
    import filelock

    store = cache.default()
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.1)
    with filelock.FileLock(store.store / f"{cache.key_of(cache.canonical(CONFIG))}.lock"):
        assert store.find_or_make(CONFIG, lambda: made) == (made, True)
    assert store.find(CONFIG) is None


def test_old_fingerprints_and_leftovers_go_away(stored, folder, monkeypatch):
    now, day = time.time(), 86400
    own = stored.parent

    def make(index, days):
        path = folder / f"{index:032x}"
        path.mkdir()
        about = path / cache.ABOUT
        about.write_text("")
        os.utime(about, (now - days * day, now - days * day))
        return path

    recent = [make(i, days=i + 1) for i in range(tidy.KEEP_OTHERS)]
    gone = [make(100, days=31), make(101, days=20)]
    foreign = folder / "notes"
    foreign.mkdir()
    killed, live = own / "abc.tmp1234", own / "def.tmp1234"
    for path in (killed, live):
        path.mkdir()
        (path / "kernel.o").write_bytes(b"x")
    os.utime(killed, (now - 7200, now - 7200))
    tidy.tidy(folder, [own])
    assert all(p.exists() for p in [*recent, foreign, live, stored]) and not any(p.exists() for p in [*gone, killed])

    monkeypatch.setattr(tidy, "KEEP_KERNELS", 2)
    for i in range(4):
        path = own / f"{i}.so"
        path.write_bytes(b"")
        os.utime(path, (now - i - 10, now - i - 10))
    tidy.tidy(folder, [own])
    assert sorted(p.name for p in own.glob("*.so")) == sorted(["0.so", stored.name])
