"""Settings of the four papers as data, and what runs them."""

from studies.papers import fedhpl, fedl2g, fedotp, sgpt

SETTINGS = {
    setting.name: setting for paper in (fedhpl, sgpt, fedl2g, fedotp) for setting in paper.SETTINGS
}
