from maxrl_fast.job.screen import Screen


def test_in_a_file_every_statement_is_one_line(capsys):
    screen = Screen()
    screen.info("word " * 60)
    screen.warning("word " * 60)
    with screen.stage("evaluate", 8) as stage:
        stage.advance(8)
    output = capsys.readouterr()
    assert output.out == "word " * 60 + "\nevaluate 8/8  0 s left\n"
    assert output.err == "warning: " + "word " * 60 + "\n"
