from tests.measured import measure

measure()
