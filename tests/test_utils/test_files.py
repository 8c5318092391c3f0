import threading

import pytest

from mmstepnet.utils.files import one_at_a_time, write_whole


@pytest.mark.parametrize('content', ['a ± b', b'\x00\xff'])
def test_text_and_bytes_are_written_whole(tmp_path, content):
    path = tmp_path / 'new' / 'file'
    write_whole(content, path)
    assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert [p.name for p in path.parent.iterdir()] == ['file']


def test_a_failed_write_leaves_the_former_file(tmp_path, monkeypatch):
    path = tmp_path / 'file'
    write_whole('old', path)

    def full_disk(descriptor):
        raise OSError('no space')

    monkeypatch.setattr('os.fsync', full_disk)
    with pytest.raises(OSError, match='no space'):
        write_whole('new', path)
    assert path.read_text() == 'old'
    assert [p.name for p in tmp_path.iterdir()] == ['file']


def test_one_waits_for_the_other(tmp_path):
    order, entered = [], threading.Event()

    def second():
        entered.wait(timeout=30)
        with one_at_a_time(tmp_path):
            order.append('second')

    thread = threading.Thread(target=second)
    thread.start()
    with one_at_a_time(tmp_path):
        entered.set()
        thread.join(timeout=0.3)
        assert thread.is_alive()
        order.append('first')
    thread.join(timeout=30)
    assert order == ['first', 'second']


def test_a_folder_that_can_not_be_made_keeps_nobody_waiting(tmp_path):
    (tmp_path / 'file').touch()
    with one_at_a_time(tmp_path / 'file' / 'folder'):
        pass
